"""Named operations that every rank may submit in an order of its own, and that all execute in one order.

Enters: submissions, by a `negotiator`. Leaves: their results, by handle. Inside: at its desk (`desks`) every rank hands
in what it has ready; `links` bring it to rank 0, whose `coordinator` decides what is executed next, and finds what does
not fit together (`agreement`); `execution` executes it, on the `planes` that move data. `context` makes one negotiator
per `hvd.init`.
"""
