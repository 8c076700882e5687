-- Let the shard's clock go on. Groupers do so about once a second: while none does, no deadline comes nearer.
-- KEYS  void, trainer
-- Returns  its time in ms
-- include clock
local now = now_ms()
local ms = shard_ms(redis.call('HGET', keys.trainer, 'clock'), now)
redis.call('HSET', keys.trainer, 'clock', string.format('%.17g %.17g', ms, now))
return ms
