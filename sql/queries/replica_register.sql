-- $1 token   $2 name   $3 lease in seconds   $4 does a session hold the token's lock?
-- Without one (through a pooler in transaction mode) the lease alone says that the replica lives.
INSERT INTO {{outbox_replica}} (token, name, session_pid, lease_until)
VALUES ($1, $2, CASE WHEN $4 THEN pg_backend_pid() ELSE 0 END, clock_timestamp() + make_interval(secs => $3::float8))
