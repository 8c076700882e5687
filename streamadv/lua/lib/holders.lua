-- Who has the tickets of an open group: the field 'holders' of its hash has the nonces of calls of `begin`, and is '' when
-- nobody has them any more. From so many characters on no more are noted, and the group is never withdrawn.
local MAX_HOLDERS = 200

local function is_withdrawn(group_key)
  local group = redis.call('HMGET', group_key, 'holders', 'slots', 'unfilled')
  return group[1] == '' and group[2] == group[3]
end
