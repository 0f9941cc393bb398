-- Rows in hand, of all replicas: small. Is anything of this aggregate in hand? What did a dead one hold?
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_claimed}} ON {{outbox}} (
    aggregate_type COLLATE "C", aggregate_id COLLATE "C", id
) WHERE status = 'pending' AND claimed_by IS NOT NULL
