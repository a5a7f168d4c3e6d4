"""The parts of Horovod's launcher that tools import, under Horovod's names. Rankless's launcher does not use them."""
