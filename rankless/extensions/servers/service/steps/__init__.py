"""From the changes that workers send to steps of all of them together: transactions, and the parts of lost workers."""
