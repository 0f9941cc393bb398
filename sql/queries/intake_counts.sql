-- Dead letters by source and status.
SELECT source, status, count(*) FROM {{outbox_dead_letter}} GROUP BY source, status
