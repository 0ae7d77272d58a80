"""Compiles kernels_src/ into cubins, refuses what must not ship, and writes manifest.json.

Needs no PyTorch and no GPU. `python -m build_tools --help` is the developer's door, hatch_build.py
the one that `pip install .` uses; both call `build_tools.build.build`.
"""
