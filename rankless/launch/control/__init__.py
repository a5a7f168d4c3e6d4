"""The control channel between the agents of several hosts: who is there, what all are to do, what happened.

Enters: a token and an address. Leaves: typed frames, each proven to come from who has the token. The agents call it;
no training data travels on it.
"""
