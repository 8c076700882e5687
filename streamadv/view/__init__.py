"""`streamadv view`: a page that shows a run while it runs. It only reads, with an observer's rights.

In reading order: `app` (addresses and what may be asked), `serve` (the server, its host and password), `board` (the
screen of the whole run), `book` (all groups, by lines), `rollouts` (one group, its tokens, one batch, also computed
again), over `texts` (text of tokens) and `pages` (the templates). The browser gets HTML that is escaped here,
a script and a style sheet.
"""
