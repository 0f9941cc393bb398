-- Draw a token and take its session lock, before anybody can see the token. False: another table
-- of this database has a live token of the same number; draw again.
-- $1 lock class
SELECT t.token, pg_try_advisory_lock($1::int, t.token) AS locked
FROM (SELECT nextval('{{outbox_token}}')::int AS token) t
