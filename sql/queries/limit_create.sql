-- From now on larger payloads are refused. Both in one transaction, so that none slips in between.
DROP TRIGGER IF EXISTS {{name:outbox_limit_payload}} ON {{outbox}};
CREATE TRIGGER {{name:outbox_limit_payload}} BEFORE INSERT ON {{outbox}}
    FOR EACH ROW EXECUTE FUNCTION {{outbox_refuse_large}}('{{most}}')
