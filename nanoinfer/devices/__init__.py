"""What devices offer, in one place: nothing else in the engine asks whose device it is (docs/devices.md)."""
