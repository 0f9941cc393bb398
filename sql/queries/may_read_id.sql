-- May we have the ids of what we insert?
SELECT has_column_privilege('{{outbox}}'::regclass, 'id', 'SELECT')
