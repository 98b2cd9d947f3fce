"""What the native core does for `deferred`, `checkpoint` and `mpi` over MPI, in Python and NumPy.

The results are the same, bit for bit; tests compare the two. ``_native.py`` offers these functions
and classes under the names and with the signatures of ``_native.pyi``.
"""
