"""Where every trajectory is, whether the ledger balances, and who waits for what."""

from .ledger import problems_of, read_status

__all__ = ["problems_of", "read_status"]
