-- Takeover, last statement: forget the replica once nothing is claimed under its name any more.
-- $1 dead token
DELETE FROM {{outbox_replica}} r
WHERE r.token = $1 AND r.lease_until = '-infinity'
  AND NOT EXISTS (SELECT FROM {{outbox}} o
                  WHERE o.status = 'pending' AND o.claimed_by IS NOT NULL AND o.claimed_by = r.name)
