"""Named operations that every rank may submit in an order of its own, and that all execute in one order.

Enters: submissions (`submissions`), by a `negotiator`. Leaves: their results, by handle. Inside: `links` carries messages
between every rank and rank 0, whose `coordinator` decides what is executed next and finds what does not fit together;
`execution` executes it, on the `planes` that move data. `context` makes one negotiator per `hvd.init`.
"""
