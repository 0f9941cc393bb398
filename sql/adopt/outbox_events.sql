-- Takes an `outbox_events` table (UUID id, event_sequence, PENDING/CLAIMED/DISPATCHED, claim_owner) into service:
-- its events that are not dispatched yet become events of the outbox, in their order, and the application goes on
-- inserting into `outbox_events` as before.
--
-- Stop what used to dispatch them. Then, after `bellwire migrate` and before the first `bellwire run`:
--
--     psql "$DATABASE_URL" --set ON_ERROR_STOP=1 --file sql/adopt/outbox_events.sql
--
-- All in one transaction: it happens as a whole or not at all. Writers wait while the undispatched rows are copied.
-- If a long transaction still writes to the table, it ends with "lock timeout" after some seconds: run it again.
-- For another schema or other names replace "public", "outbox_events" or "outbox".
--
-- What was event_sequence is the outbox id, and what was the id is event_id: a consumer that knows events by either goes
-- on. Rows in status CLAIMED may have been sent already and are sent (again): consumers drop repeats. A row that was
-- given up (POISON or any other status) stays given up and holds nothing back. Dispatched rows stay in
-- outbox_events_adopted, which nothing needs any more.

BEGIN;
SET LOCAL lock_timeout = '5s';

-- Whoever is still writing ends first; nobody begins before this is done.
LOCK TABLE public.outbox_events IN ACCESS EXCLUSIVE MODE;
LOCK TABLE public.outbox IN SHARE ROW EXCLUSIVE MODE;

DO $$
BEGIN
    IF EXISTS (SELECT FROM public.outbox) THEN
        RAISE EXCEPTION 'public.outbox has events already, whose ids would be mixed up with those of public.outbox_events'
            USING HINT = 'Adopt into a fresh outbox: set database.table to another name and run bellwire migrate.';
    END IF;
END
$$;

INSERT INTO public.outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at, next_attempt_at, event_id,
                           correlation_id, attempts, status, holds, last_error)
OVERRIDING SYSTEM VALUE
SELECT e.event_sequence, e.aggregate_type, e.aggregate_id, e.event_type, e.payload, e.created_at, now(), e.id,
       e.correlation_id,
       CASE WHEN e.status IN ('PENDING', 'CLAIMED') THEN 0 ELSE e.retry_count END,
       CASE WHEN e.status IN ('PENDING', 'CLAIMED') THEN 'pending' ELSE 'dead' END,
       CASE WHEN e.status NOT IN ('PENDING', 'CLAIMED') THEN false END,
       CASE WHEN e.status NOT IN ('PENDING', 'CLAIMED') THEN 'adopted with status ' || e.status END
FROM public.outbox_events e
WHERE e.status <> 'DISPATCHED'
ORDER BY e.event_sequence;

-- Ids go on where event_sequence was.
SELECT setval(pg_get_serial_sequence('public.outbox', 'id'),
              greatest((SELECT coalesce(max(event_sequence), 0) FROM public.outbox_events), 1),
              EXISTS (SELECT FROM public.outbox_events));

ALTER TABLE public.outbox_events RENAME TO outbox_events_adopted;

-- What the application sees from now on.
CREATE VIEW public.outbox_events AS
SELECT o.event_id AS id, o.id AS event_sequence, o.aggregate_type, o.aggregate_id, o.event_type, o.payload,
       o.correlation_id,
       CASE o.status WHEN 'published' THEN 'DISPATCHED'
                     WHEN 'pending' THEN CASE WHEN o.claimed_by IS NULL THEN 'PENDING' ELSE 'CLAIMED' END
                     ELSE 'POISON' END AS status,
       o.claimed_by AS claim_owner, o.attempts AS retry_count, o.created_at, o.published_at AS dispatched_at
FROM public.outbox o;

-- RETURNING id and event_sequence work as before. The function runs with the rights of its owner, so that writers need
-- INSERT on the view and nothing else.
CREATE FUNCTION public.outbox_events_insert() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
    BEGIN
        IF coalesce(NEW.status, 'PENDING') <> 'PENDING' THEN
            RAISE EXCEPTION 'an event is inserted as PENDING, not as %', NEW.status;
        END IF;
        INSERT INTO public.outbox (aggregate_type, aggregate_id, event_type, payload, event_id, correlation_id, created_at)
        VALUES (NEW.aggregate_type, NEW.aggregate_id, NEW.event_type, NEW.payload, coalesce(NEW.id, gen_random_uuid()),
                NEW.correlation_id, coalesce(NEW.created_at, now()))
        RETURNING id, event_id, created_at INTO NEW.event_sequence, NEW.id, NEW.created_at;
        RETURN NEW;
    END
    $$;
CREATE TRIGGER outbox_events_insert INSTEAD OF INSERT ON public.outbox_events
    FOR EACH ROW EXECUTE FUNCTION public.outbox_events_insert();

-- Who could write to the table can write to the view.
DO $$
DECLARE
    given record;
BEGIN
    FOR given IN
        SELECT DISTINCT a.privilege_type, CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE format('%I', r.rolname) END AS party
        FROM pg_catalog.pg_class c, aclexplode(c.relacl) a LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
        WHERE c.oid = 'public.outbox_events_adopted'::regclass AND a.privilege_type IN ('INSERT', 'SELECT')
    LOOP
        EXECUTE format('GRANT %s ON public.outbox_events TO %s', given.privilege_type, given.party);
    END LOOP;
END
$$;

COMMIT;
