-- How many published events are over their time; counting stops at $2.
-- $1 seconds to keep them for   $2 where to stop
SELECT count(*) FROM (
    SELECT FROM {{outbox}}
    WHERE status = 'published' AND published_at < now() - make_interval(secs => $1::float8)
    ORDER BY published_at
    LIMIT $2::int
) old
