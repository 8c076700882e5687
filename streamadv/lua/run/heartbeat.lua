-- A producer says that it is alive, serves, has finished or gone; rank 0 takes off the list who is gone. An instance
-- whose name has been taken by a later one writes nothing.
-- KEYS  void, producers, trainer
-- ARGV  producer, 'open', 'serves', 'finished', 'gone' or '' ('serves' or 'finished' if this instance is listed so, else
--       'open'), its instance ('' = a new one, -1 = a copy of the producer), then what else it says, each one word or more
-- Returns  {version or nil, drop_after or nil of the trainer, the instance that has the name, '1' if the trainer has ended
--          the run, newest version that has weights and their URI}
-- include clock
local state, digits = string.match(redis.call('HGET', keys.producers, ARGV[1]) or '', '^%d+ (%a+) (%d+)')
local holder = digits and #digits <= 15 and tonumber(digits) or 0
local instance = tonumber(ARGV[3]) or math.max(now_ms(), holder + 1)
if instance >= holder then
  local said = ARGV[2]
  if said == '' then
    local keeps = instance == holder and (state == 'finished' or state == 'serves')
    said = keeps and state or 'open'
  end
  holder = instance
  local words = {string.format('%.17g', now_ms()), said, string.format('%.17g', instance)}
  for i = 4, #ARGV do words[i] = ARGV[i] end
  redis.call('HSET', keys.producers, ARGV[1], table.concat(words, ' '))
end
local trainer = redis.call('HMGET', keys.trainer, 'version', 'drop_after', 'finished', 'weights')
return {trainer[1], trainer[2], string.format('%.17g', holder), trainer[3] or '', trainer[4] or ''}
