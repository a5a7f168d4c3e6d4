"""What workers and servers send each other, and how they connect."""
