-- The outbox began or ceased to lag. Answers a row to the one who changed it, and tells the people.
-- $1 does it lag?
UPDATE {{outbox_relay_state}} SET lagging = $1, changed_at = now()
WHERE id = 1 AND lagging IS DISTINCT FROM $1
RETURNING id
