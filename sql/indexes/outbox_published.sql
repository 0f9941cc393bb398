-- Published events by age, for pruning.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_published}} ON {{outbox}} (published_at) WHERE status = 'published'
