"""What the agent says to the workers' parent on the lifeline."""

STOP = b"T"
"""End the workers politely."""
INTERRUPT = b"I"
"""End them as Ctrl-C does."""
KILL = b"K"
"""End everything at once, as when the lifeline ends."""
