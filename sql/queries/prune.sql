-- One step of pruning: delete published events whose time is over, the oldest first. By one replica at a
-- time; waits for no row lock. Never touches an event that is pending, dead or discarded.
-- $1 lock class   $2 seconds to keep them for   $3 rows at most   $4 the table's name
WITH gate AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock($1::int, $4::text::regclass::oid::int) AS mine
), old AS MATERIALIZED (
    SELECT o.id FROM {{outbox}} o
    WHERE (SELECT g.mine FROM gate g)
      AND o.status = 'published' AND o.published_at < now() - make_interval(secs => $2::float8)
    ORDER BY o.published_at
    LIMIT $3::int
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {{outbox}} WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
)
SELECT (SELECT mine FROM gate) AS mine, (SELECT count(*) FROM gone) AS gone
