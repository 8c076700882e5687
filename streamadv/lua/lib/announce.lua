-- announce(): the trainer may have made room, so producers that wait for admission ask again. They block on the stream
-- `admission`, from the entry on that the field `announced` of `trainer` named when they were refused.
-- KEYS  trainer, admission
local function announce()
  local id = redis.pcall('XADD', keys.admission, 'MAXLEN', 1, '*', 'n', 1)
  if id.err then  -- somebody has overwritten it
    redis.call('DEL', keys.admission)
    id = redis.call('XADD', keys.admission, 'MAXLEN', 1, '*', 'n', 1)
  end
  redis.call('HSET', keys.trainer, 'announced', id)
end
