"""The Grafana boards of a run, made with Grafana's typed builders.

In reading order: `promql` (expressions), `panels` (what a panel is), `health` (the first row of every board),
`training`, `flow`, `processes` (the rows of one board each) and `boards` (the files).
"""
