-- Takes a table of the layout that outbox routers of change data capture read (id, aggregatetype, aggregateid, type,
-- payload) into service: the rows that are in it become events of the outbox, and the application goes on inserting into
-- it, and deleting from it, as before.
--
-- Stop the connector, and let it come to its end: what it has sent and the application has not deleted is sent again.
-- Then, after `bellwire migrate` and before the first `bellwire run`:
--
--     psql "$DATABASE_URL" --set ON_ERROR_STOP=1 --file sql/adopt/outbox_router.sql
--
-- All in one transaction: it happens as a whole or not at all. Writers wait while the rows are copied. If a long
-- transaction still writes to the table, it ends with "lock timeout" after some seconds: run it again. For another schema
-- or other names replace "public", "outboxevent" or "outbox"; if the table itself is called outbox, set database.table
-- to another name first.
--
-- The layout has no column that tells the order. Rows are taken in the order in which they lie in the table, which for
-- a table that is only inserted into is the order of their insertion; if yours has a column for it, name it where
-- "ctid" stands. `payload` may be jsonb, json or text; text that is no JSON ends this with an error that shows it, and
-- nothing is changed.

BEGIN;
SET LOCAL lock_timeout = '5s';

LOCK TABLE public.outboxevent IN ACCESS EXCLUSIVE MODE;

INSERT INTO public.outbox (aggregate_type, aggregate_id, event_type, payload, event_id)
SELECT e.aggregatetype, e.aggregateid, e.type, coalesce(e.payload::text, 'null')::jsonb, e.id::uuid
FROM public.outboxevent e
ORDER BY e.ctid;

ALTER TABLE public.outboxevent RENAME TO outboxevent_adopted;

-- What the application sees from now on: what is not published yet.
CREATE VIEW public.outboxevent AS
SELECT o.event_id AS id, o.aggregate_type AS aggregatetype, o.aggregate_id AS aggregateid, o.event_type AS type,
       o.payload
FROM public.outbox o
WHERE o.status = 'pending';

CREATE FUNCTION public.outboxevent_insert() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
    BEGIN
        INSERT INTO public.outbox (aggregate_type, aggregate_id, event_type, payload, event_id)
        VALUES (NEW.aggregatetype, NEW.aggregateid, NEW.type, coalesce(NEW.payload, 'null'::jsonb),
                coalesce(NEW.id, gen_random_uuid()))
        RETURNING event_id INTO NEW.id;
        RETURN NEW;
    END
    $$;
CREATE TRIGGER outboxevent_insert INSTEAD OF INSERT ON public.outboxevent
    FOR EACH ROW EXECUTE FUNCTION public.outboxevent_insert();

-- Applications like to delete a row right after its insertion, in the same transaction, as the connector has read it
-- from the log by then. Here the row is what is sent, so that deletion does nothing; published rows are pruned.
CREATE FUNCTION public.outboxevent_delete() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    AS $$
    BEGIN
        RETURN OLD;
    END
    $$;
CREATE TRIGGER outboxevent_delete INSTEAD OF DELETE ON public.outboxevent
    FOR EACH ROW EXECUTE FUNCTION public.outboxevent_delete();

-- Who could write to the table can write to the view.
DO $$
DECLARE
    given record;
BEGIN
    FOR given IN
        SELECT DISTINCT a.privilege_type, CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE format('%I', r.rolname) END AS party
        FROM pg_catalog.pg_class c, aclexplode(c.relacl) a LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
        WHERE c.oid = 'public.outboxevent_adopted'::regclass AND a.privilege_type IN ('INSERT', 'SELECT', 'DELETE')
    LOOP
        EXECUTE format('GRANT %s ON public.outboxevent TO %s', given.privilege_type, given.party);
    END LOOP;
END
$$;

COMMIT;
