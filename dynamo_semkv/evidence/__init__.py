"""Evidence: who may hold KV that helps this prompt. It proposes; it never decides a route and never promises a
token."""
