"""Columns as attributes, for every form of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class Columns:
    """Columns as attributes: `mb.input_ids`, `mb.advantages`, and any other by its name.

    `columns` holds them by name, `name in mb` says whether `mb` has one. An attribute that is no column raises
    AttributeError, which lists the columns.
    """

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = dict(columns)

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["columns"][name]  # type: ignore[no-any-return]
        except KeyError:
            present = ", ".join(self.__dict__.get("columns", ())) or "none"
            raise AttributeError(f"no column {name}: this batch has {present}") from None

    def __contains__(self, name: str) -> bool:
        return name in self.columns
