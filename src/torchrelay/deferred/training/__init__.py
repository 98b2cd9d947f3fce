"""What torchdistX has for training: optimizers and gradient reductions, each a module of its own.

Public: :mod:`.any_precision`, :mod:`.slowmo`, :mod:`.gossip`.
"""
