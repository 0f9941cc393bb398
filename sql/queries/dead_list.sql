-- Dead events, the oldest first.
-- $1..$8 see dead_filter.sql   $9 rows at most
SELECT o.id, o.aggregate_type, o.aggregate_id, o.event_type, o.attempts, o.last_error,
       o.holds IS NOT FALSE AS holds,
       CASE WHEN isfinite(o.created_at) THEN extract(epoch FROM now() - o.created_at)::float8 END AS age_seconds
FROM {{outbox}} o
WHERE {{dead_filter}}
ORDER BY o.id
LIMIT $9::int
