-- Takeover, third statement: release its rows; a snapshot of its own sees what that last claim took.
-- Rows that somebody holds locked are left for the next look.
-- $1 dead token
WITH locked AS MATERIALIZED (
    SELECT o.id FROM {{outbox}} o
    WHERE o.status = 'pending' AND o.claimed_by IS NOT NULL
      AND o.claimed_by = (SELECT r.name FROM {{outbox_replica}} r
                          WHERE r.token = $1 AND r.lease_until = '-infinity')
    ORDER BY o.id
    FOR UPDATE SKIP LOCKED
)
UPDATE {{outbox}} SET claimed_by = NULL, claimed_until = NULL
WHERE id = ANY (ARRAY(SELECT id FROM locked))
