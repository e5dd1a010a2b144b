"""The method ``auto``: measures the other methods on this machine and uses the fastest."""
