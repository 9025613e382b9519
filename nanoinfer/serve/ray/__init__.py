"""Replicas of the server behind one address, on Ray Serve."""
