"""HTTP on sockets: connections, bodies, admission, errors."""
