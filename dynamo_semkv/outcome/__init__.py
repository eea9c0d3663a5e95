"""Outcomes: which route was confirmed, declined or never answered, each exactly once.

`join` pairs routes with reports (pure), `book` holds what is open, `closed` says what became of it, `history` sums up,
`intake` feeds the book from the bus. Nothing here decides a route, and nothing is called reuse that a backend did not
confirm.
"""
