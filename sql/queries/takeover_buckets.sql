-- Takeover, second statement: free its buckets. Waits for a claim that still runs in the dead
-- client's backend (it holds them FOR SHARE), bounded by lock_timeout, and bars a later one.
-- $1 dead token
UPDATE {{outbox_bucket}} SET token = NULL
WHERE token = $1
  AND EXISTS (SELECT FROM {{outbox_replica}} r WHERE r.token = $1 AND r.lease_until = '-infinity')
