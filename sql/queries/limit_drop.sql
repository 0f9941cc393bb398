-- Any size of payload is taken again.
DROP TRIGGER IF EXISTS {{name:outbox_limit_payload}} ON {{outbox}}
