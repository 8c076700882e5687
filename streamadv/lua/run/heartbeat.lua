-- A producer says that it is alive, finished or gone. Who is gone is taken off the list by rank 0.
-- A later instance of the same name has taken its place then: what this one says is not written.
-- KEYS  void, producers, trainer
-- ARGV  producer, 'open', 'finished' or 'gone', its instance ('' = a new one)
-- Returns  {version or nil, drop_after or nil of the trainer, the instance that has the place}
-- include clock
local text = string.match(redis.call('HGET', keys.producers, ARGV[1]) or '', ' (%d+)$')
local there = text and #text <= 15 and tonumber(text) or 0
local instance = tonumber(ARGV[3]) or math.max(now_ms(), there + 1)
if instance >= there then
  there = instance
  local words = {string.format('%.17g', now_ms()), ARGV[2], string.format('%.17g', instance)}
  redis.call('HSET', keys.producers, ARGV[1], table.concat(words, ' '))
end
local heard = redis.call('HMGET', keys.trainer, 'version', 'drop_after')
return {heard[1], heard[2], string.format('%.17g', there)}
