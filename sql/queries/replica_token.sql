-- Draw a token and take its session lock, before anybody can see the token. False: another table
-- of this database has a live token of the same number; draw again.
-- Through a pooler in transaction mode no lock is taken: it would stay with a session that serves others.
-- $1 lock class   $2 does the session stay ours?
SELECT t.token, CASE WHEN $2 THEN pg_try_advisory_lock($1::int, t.token) ELSE true END AS locked
FROM (SELECT nextval('{{outbox_token}}')::int AS token) t
