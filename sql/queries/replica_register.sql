-- $1 token   $2 name   $3 lease in seconds
INSERT INTO {{outbox_replica}} (token, name, session_pid, lease_until)
VALUES ($1, $2, pg_backend_pid(), clock_timestamp() + make_interval(secs => $3::float8))
