-- We look no more by ourselves: from now on writers ring. One that has read the value before holds its lock
-- on the outbox until its rows can be seen.
SELECT {{outbox_go_quiet}}()
