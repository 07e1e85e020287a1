"""The ways to train that are compared; each module has a class `Peer`."""
