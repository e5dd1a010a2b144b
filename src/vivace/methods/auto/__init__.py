"""The method that measures the others on this machine and takes the fastest."""
