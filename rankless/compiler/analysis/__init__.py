"""Analysis of a captured program: how its values and its loss depend on the batch."""
