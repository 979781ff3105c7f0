"""The same local work in other libraries, one script a library, run by ``benchmarks/peers.py``."""
