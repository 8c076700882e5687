-- The trainer's checkpoint contains every batch below `committed` and none from it on: first step of a commit. If the
-- run had committed more, its prompts have to be set back: `set_back` says so until the takeover is complete.
-- KEYS  void, session
-- fenced by session
-- ARGV  fence, committed
-- Returns  1
local before = tonumber(redis.call('HGET', keys.session, 'committed') or '') or 0
if tonumber(ARGV[2]) < before then redis.call('HSET', keys.session, 'set_back', '1') end
redis.call('HSET', keys.session, 'committed', ARGV[2], 'committed_in', session)
return 1
