"""Bridges to packages that people use beside streamadv. Nothing else in the package imports them.

`engines/`: what inference engines return, as the columns of a push. `verifiers.py`: episodes of verifiers, the same.
"""
