"""The live page: placement against materialization. It shows the snapshot of `observe/snapshot.py` and decides nothing.

`server.py`: the HTTP server. `access.py`: who may read. `rate_limit.py`: how often. `idle_connections.py`: closes
connections without a request. `broadcast.py`: one snapshot for all who watch. `files.py`: the files of the page.
`http_log.py`: what the server logs. In `static/`: `index.html` has the tables' headings; in `static/js/`, `tables.js`
fills the tables (replicas, routes, outcomes, decisions), `overview.js` header and funnel, `route.js` one route,
`words.js` says in words what closed sets mean.
"""
