-- A rank of the training job says that it is alive, and where it is.
-- KEYS  void, session
-- fenced by session
-- ARGV  fence, rank, what it says as JSON
-- Returns  1, 0 when nobody has the run: it was deleted
if redis.call('EXISTS', keys.session) == 0 then return 0 end
-- include clock
redis.call('HSET', keys.session, 'rank:' .. ARGV[2], string.format('%.17g', now_ms()) .. ' ' .. ARGV[3])
return 1
