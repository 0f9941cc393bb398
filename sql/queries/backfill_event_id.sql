-- Make the unpublished rows of an adopted table our own, a piece at a time: give them event ids, and
-- end the claims of the application's former relay. Nobody of ours would ever release those; a lease
-- that still runs becomes the time to wait. Rows that somebody holds locked are passed over.
-- $1 id after which to go on   $2 rows to look at
WITH piece AS MATERIALIZED (
    SELECT id, event_id, status, claimed_by FROM {{outbox}} WHERE id > $1 ORDER BY id LIMIT $2::int
), found AS MATERIALIZED (
    SELECT o.id, o.event_id IS NULL AS nameless,
           o.status = 'pending' AND o.claimed_by IS NOT NULL
           AND NOT EXISTS (SELECT FROM {{outbox_replica}} r WHERE r.name = o.claimed_by) AS foreign_claim
    FROM {{outbox}} o
    WHERE o.id = ANY (ARRAY(SELECT p.id FROM piece p
                            WHERE p.status IN ('pending', 'dead')
                              AND (p.event_id IS NULL OR p.claimed_by IS NOT NULL)))
    ORDER BY o.id
    FOR UPDATE OF o SKIP LOCKED
), filled AS (
    UPDATE {{outbox}} o
    SET event_id = coalesce(o.event_id, gen_random_uuid()),
        claimed_by = CASE WHEN NOT f.foreign_claim THEN o.claimed_by END,
        claimed_until = CASE WHEN NOT f.foreign_claim THEN o.claimed_until END,
        next_attempt_at = CASE WHEN f.foreign_claim THEN greatest(o.next_attempt_at, o.claimed_until)
                               ELSE o.next_attempt_at END
    FROM found f
    WHERE o.id = f.id
    RETURNING f.nameless
)
SELECT (SELECT max(id) FROM piece) AS last, (SELECT count(*) FILTER (WHERE nameless) FROM filled) AS filled
