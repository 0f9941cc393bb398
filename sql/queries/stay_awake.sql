-- We look by ourselves for a while: writers need not ring.
-- $1 milliseconds
SELECT {{outbox_stay_awake}}($1::int)
