-- Gives back what a replay took in hand and did not come to.
-- $1 execution
UPDATE {{outbox_dead_letter}} SET claimed_by = NULL, claimed_at = NULL WHERE claimed_by = $1
