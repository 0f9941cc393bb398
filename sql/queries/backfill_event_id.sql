-- Give event ids to the unpublished rows of an adopted table, a piece at a time. Rows that somebody
-- holds locked are passed over.
-- $1 id after which to go on   $2 rows to look at
WITH piece AS MATERIALIZED (
    SELECT id, event_id, status FROM {{outbox}} WHERE id > $1 ORDER BY id LIMIT $2::int
), filled AS (
    UPDATE {{outbox}} SET event_id = gen_random_uuid()
    WHERE event_id IS NULL
      AND id = ANY (ARRAY(SELECT o.id FROM {{outbox}} o
                          WHERE o.id = ANY (ARRAY(SELECT p.id FROM piece p
                                                  WHERE p.event_id IS NULL AND p.status IN ('pending', 'dead')))
                          ORDER BY o.id FOR UPDATE SKIP LOCKED))
    RETURNING id
)
SELECT (SELECT max(id) FROM piece) AS last, (SELECT count(*) FROM filled) AS filled
